"""What all parts of the configuration have in common. Called by cluster/config*.py alone."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One domain of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
