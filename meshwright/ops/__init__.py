"""Around a job: the engines that start it on a cluster, and the checks of its hosts."""
