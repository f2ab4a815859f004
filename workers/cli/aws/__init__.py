"""`penstock aws`: queues, bucket and permissions in an AWS account.

commands has the commands; asked reads their options, and finds the versions of models
report prints what was found
"""
