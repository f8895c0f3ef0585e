"""Other people's forms: files and metadata read into maps and written from them."""
