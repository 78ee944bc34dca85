"""The batch is split, and nothing else is changed."""

import braintools
import brainunit as u
import brainpy
import statemesh as sm
from jax.sharding import PartitionSpec as P

import brainstate

brainstate.random.seed(0)

num_inputs  = 100   # Number of input neurons
num_hidden  = 4     # Number of hidden neurons
num_outputs = 2     # Number of output neurons

time_step = 1 * u.ms
brainstate.environ.set(dt=time_step)   # Set the time step for the simulation
num_steps  = 50

batch_size = 64


class SNN(brainstate.nn.Module):
    def __init__(self, num_in, num_rec, num_out):
        # Initialize the brainstate.nn.Module base class
        super(SNN, self).__init__()

        # Parameter definitions
        self.num_in = num_in   # Number of neurons in the input layer
        self.num_rec = num_rec # Number of neurons in the recurrent layer
        self.num_out = num_out # Number of neurons in the output layer

        # Define connections from the input layer to the recurrent layer (synapse: i->r)
        # Use Sequential to connect the linear layer and the exponential decay layer together
        self.i2r = brainstate.nn.Sequential(
            # Linear layer: used to map input signals to the recurrent layer
            brainstate.nn.Linear(
                num_in, num_rec,  # Connections from the input layer to the recurrent layer
                w_init=braintools.init.KaimingNormal(scale=7 * (1 - (u.math.exp(-brainstate.environ.get_dt() / (1 * u.ms)))), unit=u.mA),  # Use Kaiming Normal initialization for weights
                b_init=braintools.init.ZeroInit(unit=u.mA)  # Bias initialized to zero
            ),
            # Exponential decay layer: decays the signal over time to match biological neuron dynamics
            brainpy.state.Expon(num_rec, tau=10. * u.ms, g_initializer=braintools.init.Constant(0. * u.mA))
        )

        # Define the recurrent layer (r), using the LIF neuron model
        self.r = brainpy.state.LIF(
            num_rec,              # Number of neurons in the recurrent layer
            tau=20 * u.ms,        # Time constant, controlling the rate of membrane potential decay
            V_reset=0 * u.mV,     # Reset value of the membrane potential
            V_rest=0 * u.mV,      # Resting membrane potential
            V_th=1. * u.mV,       # Threshold of the membrane potential, exceeding which the neuron fires a spike
            spk_fun=braintools.surrogate.ReluGrad()  # Approximate derivative function for spike implementation
        )

        # Define connections from the recurrent layer to the output layer (synapse: r->o), using a linear layer
        self.r2o = brainstate.nn.Linear(
            num_rec, num_out,          # Connections from the recurrent layer to the output layer
            w_init=braintools.init.KaimingNormal()  # Use Kaiming Normal initialization for weights
        )

        # Define the output layer (o), using an exponential decay layer to simulate the time decay of output signals
        self.o = brainpy.state.Expon(
            num_out,                    # Number of neurons in the output layer
            tau=10. * u.ms,             # Time constant, controlling the rate of output signal decay
            g_initializer=braintools.init.Constant(0.)  # Initialize current to zero
        )

    # update method: used to perform one update of the network, returning the output of the output layer
    def update(self, spike):
        # Sequentially compute through i2r, r, r2o, and o
        return self.o(self.r2o(self.r(self.i2r(spike))))


net = SNN(num_inputs, num_hidden, num_outputs)

freq = 5 * u.Hz
x_data = brainstate.random.rand(num_steps, batch_size, net.num_in) < freq * brainstate.environ.get_dt()
y_data = u.math.asarray(brainstate.random.rand(batch_size) < 0.5, dtype=int)

optimizer = braintools.optim.Adam(lr=3e-3, betas=(0.9, 0.999))
optimizer.register_trainable_weights(net.states(brainstate.ParamState))


def loss_fn(x_data, y_data):
    predictions = brainstate.transform.for_loop(net.update, x_data)
    predictions = u.math.mean(predictions, axis=0)
    return braintools.metric.softmax_cross_entropy_with_integer_labels(predictions, y_data).mean()


def train_fn(x_data, y_data):
    brainstate.nn.init_all_states(net, batch_size=len(y_data))
    grads, l = brainstate.transform.grad(loss_fn, net.states(brainstate.ParamState), return_value=True)(x_data, y_data)
    optimizer.update(grads)
    return l


states = (*net.states(brainstate.ParamState).values(), optimizer.opt_state, optimizer.step_count)
first = [state.value for state in states]


def start():
    return first


def batch(k):
    return x_data, y_data


@sm.shard_map(in_specs=(P(), P(None, "data"), P("data")), out_specs=P(), check_vma=False)
def step(values, x_data, y_data):
    for state, value in zip(states, values):
        state.restore_value(value)
    with brainstate.StateTraceStack():
        l = train_fn(x_data, y_data)
    return [state.value for state in states], l
