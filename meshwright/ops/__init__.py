"""Around a job: the engines that start it on a cluster, and the checks of hosts before its first step."""
