# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Settings of the paper's experiments."""

presets: dict = {}
