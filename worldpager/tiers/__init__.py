"""Where blocks live: the DRAM pool, the store on disk, staging on the compute device."""
