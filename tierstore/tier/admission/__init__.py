"""Admissions: which chunks go down from memory into a secondary tier, and when."""

from collections.abc import Callable, Mapping
from typing import cast

from tierstore.config.plug_ins import PlugInGroup, load_plug_in, require_members
from tierstore.errors import ConfigError, TierStoreError
from tierstore.quoting import named, quoted
from tierstore.tier.admission.checked import CheckedAdmission
from tierstore.tier.admission.on_evict import OnEvict
from tierstore.tier.admission.protocol import Admission
from tierstore.tier.admission.second_touch import SecondTouch
from tierstore.tier.admission.write_through import WriteThrough

__all__ = ["ADMISSIONS", "make_admission"]

ADMISSIONS: dict[str, Callable[[], Admission]] = {
    "write_through": WriteThrough,
    "on_evict": OnEvict,
    "second_touch": SecondTouch,
}
"""What makes the built-in admissions, by the name that a tier's `cascade` gives them."""


def make_admission(name: str, options: Mapping[str, object] | None = None) -> Admission:
    """Return a new admission for one tier, by the name in its `cascade`.

    A plug-in is given the options as keyword arguments.

    Raises:
        ConfigError: there is no such admission, or the plug-in makes none of these options.
    """
    built_in = ADMISSIONS.get(name)
    if built_in is not None:
        return built_in()
    make = load_plug_in(PlugInGroup.ADMISSIONS, name)
    what = f"secondary[].cascade: {quoted(name)}"
    try:
        admission = make(**(options or {}))
    except TierStoreError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: the plug-in makes no admission: {named(error)}; see "
            "secondary[].cascade_options"
        ) from error
    require_members(admission, Admission, what)
    return CheckedAdmission(cast("Admission", admission), name)
