"""Fakes that several kinds of tests share."""
