"""Published claims, reproduced: declared as data beside the recipes, run, judged by one rule, written as pages."""
