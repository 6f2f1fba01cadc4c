"""What all parts of the configuration have in common. Called by cluster/config*.py alone."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

DRAIN_MARGIN_S = 15.0  # from the end of a replica's own time to finish until Serve kills it


class Section(BaseModel):
    """One domain of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
