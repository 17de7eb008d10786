"""Other people's formats, read into ours."""
