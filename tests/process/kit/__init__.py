"""The test kit: a real cluster, a blocking client of it, and questions about what is left."""

from kit.client import Client as Client
from kit.cluster import COLD as COLD
from kit.cluster import FAST_CLOCKS as FAST_CLOCKS
from kit.cluster import PATIENT_CLOCKS as PATIENT_CLOCKS
from kit.cluster import Stage as Stage
from kit.cluster import stage as stage
from kit.processes import alive as alive
from kit.processes import free_ports as free_ports
from kit.processes import kill as kill
from kit.processes import stopped as stopped
from kit.specs import DEMO_MODEL as DEMO_MODEL
from kit.specs import assert_blames as assert_blames
from kit.specs import group as group
from kit.specs import model as model
from kit.specs import script as script
from kit.specs import spec_of as spec_of
from kit.specs import stretched_model as stretched_model
from kit.states import STATES as STATES
from kit.states import brought_to as brought_to
from kit.waiting import DEADLINE_SECONDS as DEADLINE_SECONDS
from kit.waiting import until as until
