"""A tierstore plug-in: what urgent requests use stays longest in memory."""
