"""Configuration, bootstrap and command line of a Headwater cluster."""
