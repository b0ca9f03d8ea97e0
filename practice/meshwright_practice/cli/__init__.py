"""The verbs of `meshwright practice`, one file each."""
