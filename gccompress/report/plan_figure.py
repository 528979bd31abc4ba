"""The figure of a plan: projections against depth, coloured by the share of parameters kept."""

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gccompress.errors import PlanError
from gccompress.plan import Plan
from gccompress.plan_file import Cell, cells, planned_roles
from gccompress.roles import Role

# Edges of the groups, told apart from their neighbours; the basis's side is in the line style.
_EDGES = ("#D55E00", "#56B4E9", "#CC79A7", "#009E73")
_STYLES = {"share_input": "-", "share_output": (0, (3, 1.5))}
_DENSE = "#f2f2f2"
_WIDE = 16  # layers up to which every cell has room for a word


def plan_figure(plan: Plan) -> Figure:
    """Draw what a plan makes of every matrix: depth across, projections down.

    The colour is the share of parameters kept, of the matrix or of its group. A framed run of
    cells shares one basis; a cell that stands alone between others of its group has the group's
    colour of frame. Hatched cells are MLPs of fewer neurons, crossed-out columns dropped layers.

    Raises:
        PlanError: the plan does not say how large its model's matrices are, or a move that they
            do not allow.
    """
    if plan.model.matrices is None:
        raise PlanError(
            "the plan does not name the shapes of its model's matrices, so there is no share to "
            "draw; add them: gccompress plan check PLAN --write"
        )
    found = cells(plan)
    roles, layers = planned_roles(plan), plan.model.layers
    figure = Figure(figsize=(max(8.5, 2.6 + 0.34 * layers), 4.4), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["cividis"]
    for (role, layer), cell in found.items():
        _draw_cell(axes, layer, roles.index(role), cell, colours, layers <= _WIDE)
    _frame_groups(axes, roles, found)
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_ylim(len(roles) - 0.5, -0.5)
    step = max(1, round(layers / 16))
    axes.set_xticks(range(0, layers, step))
    axes.set_yticks(range(len(roles)), [role.value for role in roles])
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    scale = figure.colorbar(_scale(colours), ax=axes, pad=0.01, aspect=18)
    scale.set_label("share of parameters kept")
    handles = _legend({cell.do for cell in found.values()})
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        columnspacing=1.4,
    )
    name = plan.model.name if len(plan.model.name) <= 60 else f"...{plan.model.name[-57:]}"
    kept = f"{plan.prediction.params_kept:.3f} of the projections kept"
    figure.suptitle(f"{name}, strategy {plan.strategy}: {kept}", fontsize=11, parse_math=False)
    return figure


def _draw_cell(axes: Axes, x: int, y: int, cell: Cell, colours: Colormap, words: bool) -> None:
    share = 0.0 if cell.share is None else cell.share
    face = _DENSE if cell.do == "dense" else "white" if cell.do == "drop_layers" else colours(share)
    hatch = {"resize_mlp": "....", "drop_layers": "xxx"}.get(cell.do)
    light = share > 0.55
    edge = "0.75" if cell.do == "drop_layers" else "0.35" if light else "0.75"
    axes.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor=edge, hatch=hatch, lw=0)
    )
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="white", lw=1.0))
    if words and cell.size is not None:
        shade = "black" if light else "white"
        box = {"facecolor": face, "edgecolor": "none", "pad": 0.5}
        axes.text(x, y, str(cell.size), ha="center", va="center", color=shade, fontsize=8, bbox=box)


def _frame_groups(axes: Axes, roles: tuple[Role, ...], found: dict[tuple[Role, int], Cell]) -> None:
    """Draw a frame around every block of neighbouring cells that share one basis."""
    groups = sorted({cell.move: cell for cell in found.values() if cell.group}.items())
    for number, (_, cell) in enumerate(groups):
        layers = sorted({layer for _, layer in cell.group})
        rows = sorted({roles.index(role) for role, _ in cell.group})
        for first, last in _runs(layers):
            for top, bottom in _runs(rows):
                axes.add_patch(
                    Rectangle(
                        (first - 0.42, top - 0.42),
                        last - first + 0.84,
                        bottom - top + 0.84,
                        fill=False,
                        edgecolor=_EDGES[number % len(_EDGES)],
                        ls=_STYLES[cell.do],
                        lw=2.0,
                    )
                )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and last of every run of consecutive numbers, which are ascending."""
    found: list[tuple[int, int]] = []
    for one in numbers:
        if found and one == found[-1][1] + 1:
            found[-1] = found[-1][0], one
        else:
            found.append((one, one))
    return found


def _scale(colours: Colormap) -> ScalarMappable:
    return ScalarMappable(Normalize(0.0, 1.0), colours)


def _legend(kinds: set[str]) -> list[Patch]:
    """Return what the marks mean, of those that are there."""
    marks = {
        "dense": Patch(facecolor=_DENSE, edgecolor="0.75", label="dense"),
        "low_rank": Patch(facecolor="#7d7c78", label="low rank"),
        "share_input": Patch(facecolor="white", edgecolor=_EDGES[0], lw=2, label="input basis"),
        "share_output": Patch(
            facecolor="white",
            edgecolor=_EDGES[0],
            ls=_STYLES["share_output"],
            lw=2,
            label="output basis",
        ),
        "resize_mlp": Patch(facecolor="#7d7c78", edgecolor="white", hatch="....", label="width"),
        "drop_layers": Patch(facecolor="white", edgecolor="0.5", hatch="xxx", label="dropped"),
    }
    return [mark for kind, mark in marks.items() if kind in kinds]
