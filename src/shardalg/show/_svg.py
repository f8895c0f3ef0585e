"""A few SVG shapes as strings, in colours that hold in light and dark and for the colour-blind.

Text and lines take their colour from classes that follow ``prefers-color-scheme``; the card
behind the drawing follows it too, so contrast never depends on the page around it. Without
style sheets the light colours stand. Cells keep one colour in both schemes, with text on them
chosen by luminance. Beyond eight ranks the eight hues come back hatched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"

# Okabe and Ito's palette without black, ordered so that neighbours differ in lightness.
HUES = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#a6a6a6")
HATCHES = ("", "M0 8L8 0", "M0 4H8", "M4 0V8M0 4H8")  # per round of the palette, in an 8 x 8 tile
COLOURS = len(HUES) * len(HATCHES)

STYLE = (
    ".sa-card{fill:#fff;stroke:#d0d7de}.sa-ink{fill:#1f2328}.sa-dim{fill:#59636e}"
    ".sa-line{stroke:#1f2328}.sa-soft{stroke:#8c959f}.sa-void{fill:#f3f4f6}.sa-mark{stroke:#6e7781}"
    ".sa-dot{fill:#0072b2}"
    "@media(prefers-color-scheme:dark){.sa-card{fill:#15191f;stroke:#3d444d}.sa-ink{fill:#e6edf3}"
    ".sa-dim{fill:#9da7b3}.sa-line{stroke:#e6edf3}.sa-soft{stroke:#6e7681}.sa-void{fill:#262c36}"
    ".sa-mark{stroke:#8b949e}.sa-dot{fill:#56b4e9}}"
)
# What the classes mean where style sheets are not applied.
PLAIN = {
    "card": 'fill="#ffffff" stroke="#d0d7de"', "ink": 'fill="#1f2328"', "dim": 'fill="#59636e"',
    "line": 'stroke="#1f2328"', "soft": 'stroke="#8c959f"', "void": 'fill="#f3f4f6"',
    "mark": 'stroke="#6e7781"', "dot": 'fill="#0072b2"',
}  # fmt: skip


# Fills for what has no colour of its own: more holders than stripes can tell, and no one owner.
MANY = (
    '<pattern id="sa-many" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="8" height="8" fill="#e4e7eb"/><rect width="4" height="8" fill="#b9c0c9"/></pattern>'
)
MIXED = (
    '<pattern id="sa-mixed" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<rect width="8" height="8" fill="#d9d2e9"/><path d="M2 2h2v2H2zM6 6h2v2H6z" fill="#6b5b95"/></pattern>'
)


def number(x: float) -> str:
    """A coordinate with at most two decimals and no trailing zeros."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def themed(*names: str) -> str:
    """The attributes of classes that follow light and dark."""
    classes, plain = " ".join(f"sa-{name}" for name in names), " ".join(PLAIN[name] for name in names)
    return f'class="{classes}" {plain}'


def rect(x: float, y: float, width: float, height: float, look: str, tip: str = "") -> str:
    """A rectangle; ``look`` holds its attributes and ``tip`` is what hovering tells."""
    box = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {box} {look}" + (f"><title>{escape(tip)}</title></rect>" if tip else "/>")


def path(d: str, look: str) -> str:
    return f'<path d="{d}" fill="none" {look}/>'


def words(
    x: float, y: float, text: str, look: str = "", *, size: float = 11, anchor: str = "start",
    bold: bool = False, mono: bool = False,
) -> str:  # fmt: skip
    """One line of text with its baseline at ``y``."""
    style = f'font-size="{number(size)}"' + (' font-weight="600"' if bold else "")
    style += f' font-family="{MONO}" xml:space="preserve"' if mono else ""
    style += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{number(x)}" y="{number(y)}" {style} {look or themed("ink")}>{escape(text)}</text>'


def dim(x: float, y: float, text: str, *, size: float = 11, anchor: str = "start") -> str:
    """One line of quiet text."""
    return words(x, y, text, themed("dim"), size=size, anchor=anchor)


def wide(text: str, size: float = 11, *, mono: bool = False) -> float:
    """A safe estimate of the width of a text in pixels."""
    return len(text) * size * (0.62 if mono else 0.58)


def swatch(k: int) -> str:
    """The fill of colour ``k``: a hue, or a hatched hue from the ninth on."""
    k %= COLOURS
    return f"url(#sa-h{k})" if k >= len(HUES) else HUES[k]


def stripes(ks: Sequence[int]) -> str:
    """The fill of a cell that several hold: diagonal stripes of their colours."""
    return f"url(#{stripes_id(ks)})"


def stripes_id(ks: Sequence[int]) -> str:
    return "sa-s" + "-".join(str(k % COLOURS) for k in ks)


def on(k: int) -> str:
    """The attributes of text that is read on colour ``k``, with a halo where it is hatched."""
    hue = HUES[k % len(HUES)]
    ink = "#ffffff" if luminance(hue) < 0.2 else "#111111"
    return f'fill="{ink}"' + (halo(hue) if k % COLOURS >= len(HUES) else "")


def halo(colour: str) -> str:
    return f' stroke="{colour}" stroke-width="4" paint-order="stroke" stroke-linejoin="round"'


def luminance(colour: str) -> float:
    """Relative luminance (WCAG) of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def definitions(colours: Iterable[int], striped: Iterable[Sequence[int]]) -> str:
    """The patterns for hatched colours and striped cells; ids are named for their content."""
    made = {"sa-many": MANY, "sa-mixed": MIXED}
    made |= {f"sa-h{k % COLOURS}": _hatch(k % COLOURS) for k in colours if k % COLOURS >= len(HUES)}
    made |= {stripes_id(ks): _stripes(ks) for ks in striped}
    return "<defs>" + "".join(made[name] for name in sorted(made)) + "</defs>"


def _hatch(k: int) -> str:
    round_, hue = divmod(k, len(HUES))
    ink = "#ffffff" if luminance(HUES[hue]) < 0.2 else "#111111"
    lines = (
        f'<path d="{HATCHES[round_]}" stroke="{ink}" stroke-opacity="0.55" stroke-width="1.2" fill="none"/>'
    )
    return (
        f'<pattern id="sa-h{k}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{HUES[hue]}"/>{lines}</pattern>'
    )


def _stripes(ks: Sequence[int]) -> str:
    width = 6
    bars = "".join(
        f'<rect x="{i * width}" width="{width}" height="{len(ks) * width}" fill="{HUES[k % len(HUES)]}"/>'
        for i, k in enumerate(ks)
    )
    side = len(ks) * width
    return (
        f'<pattern id="{stripes_id(ks)}" width="{side}" height="{side}" patternUnits="userSpaceOnUse"'
        f' patternTransform="rotate(45)">{bars}</pattern>'
    )


def document(width: float, height: float, body: Iterable[str], *, title: str, about: str = "") -> str:
    """A whole SVG document on its card, with ``about`` as its description for screen readers."""
    w, h = number(width), number(height)
    card = rect(0.5, 0.5, width - 1, height - 1, f'rx="6" {themed("card")}')
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' font-family="{FONT}">',
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc><style>{STYLE}</style>",
        card, *body, "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
