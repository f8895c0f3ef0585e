"""Other people's forms: files and metadata read into maps and written from them."""

from ._arrangements import Logical as Logical
from ._arrangements import Stored as Stored
from ._arrangements import transfer as transfer
from ._checkpoints import Checkpoint as Checkpoint
from ._checkpoints import load as load
from ._checkpoints import open_checkpoint as open_checkpoint
from ._layout_files import arrange as arrange
from ._layout_files import parse_layout_file as parse_layout_file
from ._layout_files import read_layout_file as read_layout_file
