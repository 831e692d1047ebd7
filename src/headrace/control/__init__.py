"""The control loop: reads what happened, moves knobs."""
