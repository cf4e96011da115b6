"""What ranks say to each other: messages, their headers and frames."""
