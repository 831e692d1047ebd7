"""The same policies on a virtual clock: parts that take a request, a step or a failure as an event and answer with
the events that follow from it."""
