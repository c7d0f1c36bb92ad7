"""Draws the pictures of docs/concepts.md: `python docs/pictures/draw.py` writes them beside this file."""

from collections.abc import Callable
from html import escape
from pathlib import Path

INK, SOFT, PAPER = "#1f2937", "#6b7280", "#ffffff"
SCRIPT, WORKER, DATA, BACKEND = "#e0e7ff", "#dcfce7", "#fef3c7", "#f3f4f6"
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Picture:
    """An SVG picture of ``width`` by ``height`` points, made of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"',
            f'font-family="{escape(FONT)}" font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"',
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="12" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, w: int, h: int, *lines: str, fill: str = BACKEND, dashed: bool = False) -> None:
        """A box with lines of text in its middle; the first line is bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="{INK}" '
            f'stroke-opacity=".35"{dash}/>'
        )
        for number, line in enumerate(lines):
            below = y + h / 2 + 5 + 18 * (number - (len(lines) - 1) / 2)
            self.text(x + w / 2, below, line, bold=number == 0, soft=number > 0)

    def text(
        self, x: float, y: float, text: str, *, bold: bool = False, soft: bool = False, at: str = "middle"
    ) -> None:
        """A line of text whose middle, start or end is at ``x``, and whose foot is at ``y``."""
        style = ' font-weight="600"' * bold + ' font-size="12.5"' * soft
        color = SOFT if soft else INK
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{color}"{style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through ``points`` with its tip at the last one."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.6" marker-end="url(#tip)"{dash}/>'
        )

    def svg(self) -> str:
        """The text of the picture's file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def controller() -> Picture:
    """A call, split over the ranks of a group, and joined."""
    picture = Picture(760, 290, "A script calls a handle; the call is split over ranks, and their results are joined")
    picture.box(20, 90, 180, 110, "the script", "scores =", "scorers.score(batch)", fill=SCRIPT)
    picture.text(310, 40, "dispatch: shard()", bold=True)
    picture.text(310, 268, "collect: concat()", bold=True)
    for rank, rows in enumerate(("rows 0 to 3", "rows 4 to 7", "rows 8 to 11")):
        top = 40 + 75 * rank
        picture.box(430, top, 190, 60, f"rank {rank}", "Scorer.score", fill=WORKER)
        picture.arrow((202, 132), (426, top + 22))
        picture.arrow((428, top + 40), (204, 158), dashed=True)
        picture.text(682, top + 35, rows, soft=True)
    picture.text(525, 272, "a group: one worker in each process", soft=True)
    return picture


def layers() -> Picture:
    """What stands on what."""
    picture = Picture(760, 330, "Trainers stand on workers, these on the runtime, and below it are the backends")
    picture.box(40, 20, 680, 44, "your script, or podium train", fill=SCRIPT)
    picture.box(40, 76, 330, 52, "trainer", "stages, schedules, checkpoints", fill=SCRIPT)
    picture.box(390, 76, 330, 52, "workers of your own", fill=WORKER)
    picture.box(40, 140, 330, 52, "workers", "policy, critic, reference, generator", fill=WORKER)
    picture.box(390, 140, 330, 52, "algorithms · rewards · rollout", "no processes: tensors in, tensors out", fill=DATA)
    picture.box(40, 204, 680, 52, "runtime", "pools, groups, endpoints, deadlines, errors, restart: written once")
    names = (("inline", "in the script"), ("local", "processes"), ("ray", "actors"), ("yours", "a small package"))
    for number, (name, what) in enumerate(names):
        picture.box(40 + 173 * number, 268, 161, 48, name, what, dashed=name == "yours")
    return picture


def references() -> Picture:
    """Names travel through the script, and bytes from worker to worker."""
    picture = Picture(760, 290, "The script passes references; tensors go from worker to worker")
    picture.box(280, 20, 200, 70, "the script", "holds names of tensors", fill=SCRIPT)
    for rank in range(3):
        picture.box(40, 110 + 58 * rank, 180, 48, f"generator, rank {rank}", "4 GiB", fill=DATA)
    for rank in range(2):
        picture.box(540, 130 + 80 * rank, 180, 58, f"policy, rank {rank}", "reads 6 GiB", fill=WORKER)
    picture.arrow((150, 106), (276, 60), dashed=True)
    picture.arrow((484, 60), (612, 126), dashed=True)
    picture.text(160, 70, "a reference", soft=True)
    picture.text(600, 70, "the same reference", soft=True)
    for rank, ranks in enumerate(((0,), (0, 1), (1,))):
        for other in ranks:
            picture.arrow((224, 134 + 58 * rank), (536, 159 + 80 * other))
    picture.text(380, 270, "the bytes", soft=True)
    return picture


def step() -> Picture:
    """The stages of a step."""
    picture = Picture(760, 250, "Prompts, completions, scores, advantages, update, and the new weights")
    boxes = (
        ("generator", "draws completions", WORKER), ("reward", "scores them", DATA),
        ("estimator", "advantages", DATA), ("policy", "is updated", WORKER),
    )  # fmt: skip
    for number, (name, what, fill) in enumerate(boxes):
        left = 60 + 170 * number
        picture.box(left, 90, 130, 64, name, what, fill=fill)
        if number:
            picture.arrow((left - 38, 122), (left - 4, 122))
    picture.text(125, 34, "prompts", bold=True)
    picture.arrow((125, 44), (125, 86))
    picture.arrow((635, 158), (635, 205), (125, 205), (125, 158))
    picture.text(380, 226, "the new weights, with the number of their version", soft=True)
    picture.box(400, 20, 130, 44, "critic", "predicts rewards", dashed=True)
    picture.box(570, 20, 130, 44, "reference", "stays as it was", dashed=True)
    picture.arrow((465, 66), (465, 86), dashed=True)
    picture.arrow((635, 66), (635, 86), dashed=True)
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (controller, layers, references, step)

if __name__ == "__main__":
    for draw in PICTURES:
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text(draw().svg())
