"""What is sent and when: arrivals, lengths, traces, workloads, and the schedule made of them before a run."""
