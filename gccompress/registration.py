"""Registers the checkpoint classes with transformers once it is imported, and not before."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

AUTO_MODULE = "transformers.models.auto.configuration_auto"


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as usual, and registers our classes right after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec of the auto module, with our step added; None for any other."""
        if fullname != AUTO_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from gccompress.modeling import register_all

    register_all()


def register_when_needed() -> None:
    """Register now if transformers' auto classes are imported, else as soon as they are.

    So `import gccompress` costs neither torch nor transformers, in whatever order they come.
    """
    if AUTO_MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())
