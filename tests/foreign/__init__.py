"""What a reader who has not seen the mends tried: members of each kind that differ in mechanism from those that were mended."""
