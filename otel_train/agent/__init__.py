"""The process beside training: it reads what ranks record, and does everything else."""
