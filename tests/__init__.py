"""The models of these tests are tiny: with zeor's own default all of their parameters would stay whole on every rank,
and nothing that stage 3 does would be tested. Tests of small parameters ask for keep_whole= themselves."""

import zeor.plan

zeor.plan.KEEP_WHOLE = 0
