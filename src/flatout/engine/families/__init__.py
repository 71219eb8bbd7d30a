"""Model families. Code that depends on the model type is in the file of its family.

A model type without a family runs as in transformers: padded rows pass through the
whole model. To add your own family, subclass `Family` in a module and set
`model.family` to the name of that module. Importing the module registers the family.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from flatout.engine.parameters import ModelSettings, SettingsError

if TYPE_CHECKING:
    from flatout.engine.families._family import Family as Family, FusePlan as FusePlan
    from flatout.engine.tasks import HeadKind


def __getattr__(name: str) -> Any:
    """Import `Family` and `FusePlan` on first use, because they need torch."""
    if name not in ("Family", "FusePlan"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}._family"), name)


def families() -> list[Family]:
    """Return one instance of each registered family."""
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")
    from flatout.engine.families._family import Family

    return [family() for family in Family.known]


OWN_CODE = "flatout_own_code"
"""The config key that marks a model whose class does not come from transformers."""


def family_of(config: Any) -> Family:
    """Return the family for a model config, or the plain `Family` for unknown types."""
    own_code = bool(getattr(config, OWN_CODE, False))
    return family_of_type(getattr(config, "model_type", None), own_code=own_code)


def family_of_type(kind: str | None, *, own_code: bool = False) -> Family:
    """Return the family for the model type `kind`. User-defined families take
    precedence, and are the only ones for custom code (`own_code`)."""
    from flatout.engine.families._family import Family

    found = [family for family in families() if kind in family.model_types]
    own = [one for one in found if not _is_ours(one)]
    return next(iter([*reversed(own), *([] if own_code else found)]), Family())


def note_own_code(model: Any) -> None:
    """Set OWN_CODE in the config of a model with custom classes. The model type does
    not show this, because custom classes can use a known type, such as `bert`."""
    from flatout.engine.ops.plain import is_plain

    family = family_of(model.config)
    if not (_is_ours(family) and family.model_types):
        return
    known = isinstance(model, family.model_classes)
    if not known and not is_plain(model, model.base_model):
        setattr(model.config, OWN_CODE, True)


def _is_ours(family: Family) -> bool:
    return type(family).__module__.startswith(__name__)


def import_own(settings: ModelSettings) -> None:
    """Import the module set in `model.family`. Raises SettingsError if that fails."""
    if settings.family is None:
        return
    try:
        import_module(settings.family)
    except ImportError as error:
        raise SettingsError(
            f"model.family: {settings.family!r} cannot be imported ({error}): name a "
            "module on the Python path, such as my_package.my_family"
        ) from error


def first_type(head: HeadKind, *, causal: bool) -> str | None:
    """Return the model type to train from scratch with this head, or None if the model
    type in conf/base is suitable. `causal` selects families of decoders."""
    fitting = (f for f in families() if head in f.heads and f.causal == causal)
    return next((f.first_type for f in fitting if f.first_type), None)


def packable() -> list[str]:
    """Return the model types that can run on rows without padding, sorted by name."""
    return sorted(
        t for family in families() if family.packs for t in family.model_types
    )


def model_class(architecture: str) -> Any | None:
    """Return the class with the name `architecture` from the families, or None.
    Families list only classes that transformers does not have."""
    classes = (kind for family in families() for kind in family.model_classes)
    return next((kind for kind in classes if kind.__name__ == architecture), None)
