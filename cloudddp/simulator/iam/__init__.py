"""IAM: policies, what a call needs to be allowed, and how AWS answers if it is not. Pure; knows nothing of
moto."""
