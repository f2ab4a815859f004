"""`penstock aws`: queues, bucket and permissions in an AWS account.

versions finds the versions of models; commands has the commands, report prints what they found
"""
