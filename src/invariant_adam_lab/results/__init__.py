"""What finished runs show: `curves` reads them, `measures` compares them, `figures` and `page` draw them."""
