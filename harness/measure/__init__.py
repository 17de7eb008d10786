"""One measurement: panel + teacher capture + candidate engine -> positions and a receipt."""
