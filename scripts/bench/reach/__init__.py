"""What is to be reached, measured beside a peer, the raw device or a floor."""
