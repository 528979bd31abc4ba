"""Continuity of several models side by side: other models, or one model during its training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.continuity import ContinuityReport, analyze
from gccompress.files import new_file, write_text
from gccompress.roles import Role

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Comparison:
    """Reports in the order the models were given."""

    reports: tuple[ContinuityReport, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        """Every role that any of the models has, in the order of `Role`."""
        return tuple(role for role in Role if any(role in report.roles for report in self.reports))

    def to_json(self) -> str:
        """Return `{"models": [report, ...]}`."""
        models = [json.loads(report.to_json()) for report in self.reports]
        return json.dumps({"models": models}, indent=1) + "\n"

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write continuity.json and a figure per role; return the paths."""
        from gccompress.report.figures import drift_figure

        folder = Path(folder)
        written = []
        for role in self.roles if any(report.num_pairs for report in self.reports) else ():
            path = folder / f"continuity_{role}.png"
            figure = drift_figure(self.reports, role)
            with new_file(path) as temporary:
                figure.savefig(temporary, format="png", dpi=150)
            written.append(path)
        path = folder / "continuity.json"
        write_text(path, self.to_json())
        return path, *written

    def table(self) -> "Table":
        """Return the means of every role, model by model, each beside its random level."""
        from gccompress.report.tables import comparison_table

        return comparison_table(self.reports)


def compare_models(sources: Sequence[Any], **options: Any) -> Comparison:
    """Measure several models; `options` as for `continuity.analyze`, the same for all."""
    return Comparison(tuple(analyze(source, **options) for source in sources))
