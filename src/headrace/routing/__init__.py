"""Which replica a request goes to: state in, ``RouteDecision`` out. Pure."""
