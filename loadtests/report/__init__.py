"""One or several runs of a load test as a page that opens offline, or as text."""
