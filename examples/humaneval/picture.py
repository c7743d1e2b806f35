"""A picture of the lane over time: how many sequences the device ran, pass above pass, one scale.

White between the bars is a device that waited. Written as plain SVG, so that it opens in any
browser and needs nothing installed.
"""

from dataclasses import dataclass, field
from html import escape

_WIDTH, _LEFT, _RIGHT = 960, 132, 24
_TOP, _ROW, _GAP = 64, 96, 44
_COLOURS = ("#b0643c", "#2f7d6b", "#2f5f9e")
_TICK_SECONDS = (1, 2, 5, 10, 20, 50, 100)
_TICKS_MAX = 12


@dataclass
class Timeline:
    """How many sequences ran, sampled over one pass."""

    name: str
    window: int = 1
    samples: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the pass began, sequences running."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Moments worth a line, with what happened."""

    @property
    def seconds(self) -> float:
        """Length of the pass."""
        return self.samples[-1][0] if self.samples else 0.0


def draw(timelines: list[Timeline], *, title: str) -> str:
    """Return the picture as SVG."""
    longest = max((one.seconds for one in timelines), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + len(timelines) * (_ROW + _GAP) + 8
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )
    parts = [
        opening,
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(24, 32, title, 'font-size="17" font-weight="600"'),
    ]
    for row, (one, colour) in enumerate(zip(timelines, _COLOURS, strict=False)):
        parts += _row(one, _TOP + row * (_ROW + _GAP), scale, colour)
        parts += _axis(_TOP + row * (_ROW + _GAP) + _ROW, longest, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(one: Timeline, top: float, scale: float, colour: str) -> list[str]:
    base = top + _ROW
    points = [f"{_LEFT},{base}"]
    height = 0.0
    for seconds, running in one.samples:
        x = _LEFT + seconds * scale
        points.append(f"{x:.1f},{base - height:.1f}")
        height = _ROW * min(1.0, running / one.window)
        points.append(f"{x:.1f},{base - height:.1f}")
    end = _LEFT + one.seconds * scale
    points.append(f"{end:.1f},{base}")
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{end - _LEFT:.1f}" height="{_ROW}" fill="#f3f1ec"/>',
        f'<polygon points="{" ".join(points)}" fill="{colour}"/>',
        _text(_LEFT - 12, top + 18, one.name, 'text-anchor="end" font-weight="600"'),
        _text(_LEFT - 12, top + 38, f"{one.seconds:.1f} s", 'text-anchor="end" fill="#555"'),
    ]
    for seconds, what in one.marks:
        x = _LEFT + seconds * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{base}" stroke="#c0182b" '
            'stroke-width="2"/>'
        )
        parts.append(_text(x + 4, top - 8, what, 'fill="#c0182b" font-size="12"'))
    return parts


def _axis(base: float, longest: float, scale: float) -> list[str]:
    step = next((s for s in _TICK_SECONDS if longest / s <= _TICKS_MAX), _TICK_SECONDS[-1])
    return [
        _text(
            _LEFT + tick * scale,
            base + 16,
            f"{tick} s",
            'text-anchor="middle" fill="#777" font-size="11"',
        )
        for tick in range(0, int(longest) + 1, step)
    ]


def _text(x: float, y: float, content: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'
