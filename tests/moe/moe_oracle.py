"""The planner as the specification says it, one route at a time, in plain Python lists."""

INT32_MIN = -(2**31)


def slow_alloc(policy, B, total, caps):
    """alloc[e][d] by the two greedy loops, word for word."""
    R, E = len(caps), len(total)
    epn = E // R
    alloc = [[0] * R for _ in range(E)]
    for e in range(E):
        alloc[e][e // epn] = total[e]
    if policy == "home":
        return alloc
    group = [sum(total[h * epn : (h + 1) * epn]) for h in range(R)]
    bal = [group[r] - caps[r] for r in range(R)]
    z = [[0] * R for _ in range(R)]
    while True:
        h = max(range(R), key=lambda r: (bal[r], -r))
        u = min(range(R), key=lambda r: (bal[r], r))
        if bal[h] <= 0:
            break
        z[h][u] = -bal[u]
        bal[h] += bal[u]
        bal[u] = 0
    for h in range(R):
        rem = total[h * epn : (h + 1) * epn]
        q = z[h][:]
        taken = [0] * R
        while True:
            d = max(range(R), key=lambda r: (q[r], -r))
            if q[d] == 0:
                break
            i = max(range(epn), key=lambda j: (rem[j], -j))
            if policy == "max_copies" and taken[d] == B:
                q[d] = 0
                continue
            t = min(rem[i], q[d])
            if t == 0:
                q[d] = 0
                continue
            rem[i] -= t
            q[d] -= t
            taken[d] += 1
            alloc[h * epn + i][d] += t
            alloc[h * epn + i][h] -= t
    return alloc


def slow_plans(R, E, K, B, pad, layout, NvS, topk, policy="exact"):
    """For every rank a dict of the plan's fields as lists."""
    epn = E // R
    total = [sum(row.count(e) for t in topk for row in t) for e in range(E)]
    T = sum(total)
    caps = [T // R + (r < T % R) for r in range(R)]
    alloc = slow_alloc(policy, B, total, caps)
    copies, cu, first_row, fill, held = [], [], [], [], []
    for d in range(R):
        remote = [e for e in range(E) if e // epn != d and alloc[e][d] > 0]
        if layout == "slots":
            remote.sort(key=lambda e: (-alloc[e][d], -e))
            groups = [(e, alloc[e][d] if e // epn == d else 0) for e in range(E)]
        else:
            groups = [(e, alloc[e][d]) for e in range(d * epn, (d + 1) * epn)]
        groups += [(e, alloc[e][d]) for e in remote] + [(-1, 0)] * (B - len(remote))
        copies.append(remote + [-1] * (B - len(remote)))
        at, ends, fills, start_of = 0, [], [], {}
        for e, c in groups:
            if c:
                start_of[e] = at
            padded = -(-c // pad) * pad
            fills.append((at + c, padded - c) if padded > c else (0, 0))
            at += padded
            ends.append(at)
        cu.append(ends)
        fill.append(fills)
        first_row.append(start_of)
        held.append([e for e, _ in groups])
    seen = [0] * E
    dst, arrived = [[] for _ in range(R)], [[] for _ in range(R)]
    for s in range(R):
        for row in topk[s]:
            primary = {}
            for e in row:
                if e < 0:
                    dst[s].append(INT32_MIN)
                    continue
                g = seen[e]
                seen[e] += 1
                d = 0
                while sum(alloc[e][: d + 1]) <= g:
                    d += 1
                slot = first_row[d][e] + g - sum(alloc[e][:d])
                value = d * NvS + slot
                if d in primary:
                    dst[s].append(-value - 1)
                    primary[d].append(slot)
                else:
                    dst[s].append(value)
                    primary[d] = [slot]
            for d, slots in primary.items():
                arrived[d].append((s, slots))
    plans = []
    for r in range(R):
        groups, loffs = [], []
        for _, (first, *rest) in arrived[r]:
            if rest:
                groups.append([first, len(loffs), len(rest)])
                loffs += rest
        plans.append(
            {
                "dst": dst[r],
                "experts_to_copy": copies,
                "cu_seqlens": cu[r],
                "group_experts": held[r],
                "zero_fill_ranges": [list(f) for f in fill[r]],
                "remote_stats": [
                    sum(e >= 0 for e in copies[r]),
                    sum(e >= 0 and e // epn == r for row in copies for e in row),
                ],
                "dup_groups": groups + [[0, 0, 0]] * (NvS - len(groups)),
                "dup_loffs": loffs + [0] * (NvS - len(loffs)),
                "dup_counts": [len(groups), len(loffs)],
                "recv_slots": [
                    v if i == 0 else -v - 1 for _, slots in arrived[r] for i, v in enumerate(slots)
                ],
                "recv_rows": [sum(s == p for s, _ in arrived[r]) for p in range(R)],
                "recv_routes": [sum(len(slots) for s, slots in arrived[r] if s == p) for p in range(R)],
                "send_rows": [sum(s == r for s, _ in arrived[p]) for p in range(R)],
                "send_routes": [sum(len(slots) for s, slots in arrived[p] if s == r) for p in range(R)],
                "alloc": alloc,
                "counts": [[sum(row.count(e) for row in t) for e in range(E)] for t in topk],
            }
        )
    return plans
