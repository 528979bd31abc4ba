"""The errors this package raises on purpose; the command line turns each into one line and exit 2.

Every message names the object, what was found, what was wanted, and the remedy.
"""


class GccompressError(Exception):
    """Base of every deliberate error: bad input, missing data, an unmet budget."""


class ModelError(GccompressError):
    """A model cannot be found, read, or is damaged."""


class UnsupportedModelError(ModelError):
    """A model's architecture or storage is not one this package handles."""


class TextError(GccompressError):
    """Calibration or evaluation text is missing, unreadable or too short."""


class NumericalError(GccompressError):
    """A non-finite value or a factorisation that failed, named by tensor or window."""


class PlanError(GccompressError):
    """A plan is malformed, does not fit the model, or no plan can meet the budget."""


class MoveError(PlanError):
    """A move of a plan that contradicts another, or the model.

    Attributes:
        number: its place in the plan, from 0.
    """

    def __init__(self, name: str, number: int, do: str, why: str) -> None:
        """Say why, naming the plan, the move and its kind."""
        self.number = number
        self._name, self._what = name, f"moves[{number}] ({do}): {why}"
        super().__init__(f"{name}: {self._what}")

    def at(self, line: int) -> PlanError:
        """Return the error with the line of the file on which the move stands."""
        return PlanError(f"{self._name}: line {line}: {self._what}")


class CheckpointError(GccompressError):
    """A compressed checkpoint cannot be written, or does not reload as it was."""
