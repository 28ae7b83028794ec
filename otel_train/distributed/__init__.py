"""Reports exchanged between the ranks of a job: stragglers, hangs and the job's store."""
