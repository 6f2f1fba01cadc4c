"""What all parts of the configuration have in common. Called by cluster/config*.py alone."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from cluster.errors import ConfigError

AUTO: Final = "auto"
# For Annotated[AutoValue | Annotated[int, Field(ge=..., le=...), NUMBER], AUTO_OR_NUMBER].
AUTO_TAGS = (AUTO, "number")
AutoValue = Annotated[Literal["auto"], Tag(AUTO)]
NUMBER = Tag("number")
AUTO_OR_NUMBER = Discriminator(lambda value: AUTO if value == AUTO else "number")
DRAIN_MARGIN_S = 15.0  # from the end of a replica's own time to finish until Serve kills it


class Section(BaseModel):
    """One domain of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def unresolved(key: str) -> ConfigError:
    """The error for a value that is still auto where an application is built."""
    return ConfigError(
        f"{key} is auto, which only the serve command resolves: name a value, as "
        "./headwater config shows it"
    )
