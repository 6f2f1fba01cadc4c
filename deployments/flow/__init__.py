"""A request's way as pure decisions: events in, effects out; its record and its story."""
