"""Where shards live: plain memory of one rank (`host`) or memory that all ranks of a host map (`shared`)."""
