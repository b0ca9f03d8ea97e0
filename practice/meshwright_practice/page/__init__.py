"""The page of `meshwright practice --page`: cards, progress and the handbook in a browser, on localhost."""
