"""Admissions: which chunks go down from memory into a secondary tier, and when."""

from collections.abc import Callable

from tierstore.errors import ConfigError
from tierstore.quoting import quoted
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
"""What makes the admission of each name that a tier's `cascade` can have."""


def make_admission(name: str) -> Admission:
    """Return a new admission for one tier, by the name in its `cascade`.

    Raises:
        ConfigError: no admission has this name.
    """
    make = ADMISSIONS.get(name)
    if make is None:
        known = ", ".join(ADMISSIONS)
        raise ConfigError(f"cascade: expected one of {known}, got {quoted(name)}")
    return make()
