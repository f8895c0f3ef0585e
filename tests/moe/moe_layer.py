"""A small transformer layer with experts, dense on one process or with experts spread over a group."""

import torch

from shardalg.moe import Buffer, combine, dispatch, plan_dispatch, prefetch, reduce_grad

DIM, INNER, EXPERTS, K, SEQUENCES, LENGTH = 6, 5, 8, 2, 2, 6
TOKENS = SEQUENCES * LENGTH
SHARED = ("qkv", "proj", "router")
STEPS, RATE = 50, 0.05
DOUBLE = torch.float64


def parameters(seed=0):
    """All parameters of the layer; the router's last row pulls tokens to the first home's experts."""
    made = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=made, dtype=DOUBLE) * 0.4
    return {
        "qkv": draw(DIM, 3 * DIM), "proj": draw(DIM, DIM), "router": draw(DIM, EXPERTS),
        "w1": draw(EXPERTS, DIM, INNER), "w2": draw(EXPERTS, INNER, DIM),
    }  # fmt: skip


def batch(step, rank):
    """Inputs and targets of one rank's sequences."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(SEQUENCES, LENGTH, DIM, generator=made, dtype=DOUBLE)
    return x, torch.sin(3 * x)


def attend(x, p):
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    return x + torch.softmax(q @ k.transpose(-1, -2) / DIM**0.5, -1) @ v @ p["proj"]


def route(h, p):
    """Router weights and ids [tokens, K]; a constant bias makes the first two experts hot."""
    bias = torch.zeros(EXPERTS, dtype=DOUBLE)
    bias[:2] = 2.0
    weights, ids = torch.topk(torch.softmax(h @ p["router"] + bias, -1), K)
    return weights / weights.sum(-1, keepdim=True), ids


def normed(x):
    return torch.nn.functional.layer_norm(x, (DIM,)).reshape(-1, DIM)


def expert(rows, w1, w2):
    return torch.nn.functional.gelu(rows @ w1) @ w2


def dense_loss(p, x, y):
    """The layer on one process, every expert on the tokens that chose it; the sum of squares."""
    x = attend(x, p)
    h = normed(x)
    weights, ids = route(h, p)
    out = torch.zeros_like(h)
    for e in range(EXPERTS):
        token, k = torch.nonzero(ids == e, as_tuple=True)
        out = out.index_add(0, token, weights[token, k][:, None] * expert(h[token], p["w1"][e], p["w2"][e]))
    return ((x.reshape(-1, DIM) + out - y.reshape(-1, DIM)) ** 2).sum()


def spread_loss(buffer, p, x, y):
    """The same layer, this rank's tokens and home experts only; also the number of copied experts."""
    x = attend(x, p)
    h = normed(x)
    weights, ids = route(h, p)
    plan = plan_dispatch(buffer, ids)
    rows, row_weights = dispatch(buffer, plan, h, weights)
    own = {name: p[name] for name in ("w1", "w2")}
    slots = prefetch(buffer, plan, own)
    out, _ = combine(buffer, plan, grouped(plan, rows, own, slots), route_weights=row_weights)
    loss = ((x.reshape(-1, DIM) + out - y.reshape(-1, DIM)) ** 2).sum()
    return loss, int((plan.experts_to_copy >= 0).sum())


def grouped(plan, rows, own, slots):
    """Each segment through its expert: this rank's own, then the copied ones; padding stays zero."""
    weights = {name: torch.cat([own[name], slots[name]]) for name in own}
    ends = [0, *plan.cu_seqlens.tolist()]
    parts = [
        expert(rows[low:high], weights["w1"][g], weights["w2"][g])
        for g, (low, high) in enumerate(zip(ends, ends[1:]))
    ]
    return torch.cat([*parts, rows[ends[-1] :]])


def train_dense(ranks):
    """Losses, gradients of the last step and final parameters of the dense run on all ranks' data."""
    p, losses, grads = parameters(), [], {}
    for step in range(STEPS):
        leaves = {name: t.detach().requires_grad_() for name, t in p.items()}
        x, y = (torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(ranks))))
        loss = dense_loss(leaves, x, y) / (ranks * TOKENS)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        p = {name: p[name] - RATE * grads[name] for name in p}
        losses.append(loss.item())
    return losses, grads, p


def train_spread(group, rank):
    """The same on one rank of a group: losses, its gradients and parameters, and copies per step."""
    size = group.size()
    epn = EXPERTS // size
    mine = slice(rank * epn, (rank + 1) * epn)
    p = {name: t if name in SHARED else t[mine].clone() for name, t in parameters().items()}
    losses, copies, grads = [], [], {}
    with Buffer(group, E=EXPERTS, S=TOKENS, K=K, H=DIM, pad=4, dtype=DOUBLE, weight_dtype=DOUBLE) as buffer:
        for step in range(STEPS):
            leaves = {name: t.detach().requires_grad_() for name, t in p.items()}
            loss, copied = spread_loss(buffer, leaves, *batch(step, rank))
            loss = loss / (size * TOKENS)
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
            for name in SHARED:
                group.allreduce([grads[name]]).wait()
            total = loss.detach().clone()
            group.allreduce([total]).wait()
            p = {name: p[name] - RATE * grads[name] for name in p}
            losses.append(total.item())
            copies.append(copied)
    return losses, grads, p, copies


def by_hand(group, rank):
    """Expert gradients by autograd through prefetch, and by reduce_grad on detached copies."""
    epn = EXPERTS // group.size()
    own = {
        name: parameters()[name][rank * epn : (rank + 1) * epn].clone().requires_grad_()
        for name in ("w1", "w2")
    }
    with Buffer(group, E=EXPERTS, S=TOKENS, K=K, H=DIM, pad=4, dtype=DOUBLE, weight_dtype=DOUBLE) as buffer:
        h = normed(batch(0, rank)[0])
        plan = plan_dispatch(buffer, route(h, parameters())[1])
        rows, _ = dispatch(buffer, plan, h)
        slots = prefetch(buffer, plan, own)
        combine(buffer, plan, grouped(plan, rows, own, slots))[0].square().sum().backward()
        apart = {name: t.detach().requires_grad_() for name, t in slots.items()}
        local = {name: t.detach().requires_grad_() for name, t in own.items()}
        combine(buffer, plan, grouped(plan, rows, local, apart))[0].square().sum().backward()
        total = reduce_grad(
            buffer, plan, {n: t.grad for n, t in apart.items()}, {n: t.grad for n, t in local.items()}
        )
    return {n: (own[n].grad, total[n]) for n in own}
