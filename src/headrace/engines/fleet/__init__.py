"""Many engines behind the one seam: groups of replicas, chosen for each request as late as possible."""
