"""HTML pages that open from disk without a network: the report on runs, and the attention explorer."""
