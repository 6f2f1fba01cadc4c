"""The router: where a request runs, and why. Pure; `router.route.Router` is its entrance."""
