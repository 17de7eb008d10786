"""What runs a model on rows. One file an engine, one seam (`harness.types.Engine`)."""
