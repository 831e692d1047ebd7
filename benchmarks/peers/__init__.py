"""headrace beside real peers: the same model file, threads and context, in turns, in one run."""
