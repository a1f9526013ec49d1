"""Many runs: which ones (`grid`), how they are made (`workers`), what they cost (`cost`), their files (`store`)."""
