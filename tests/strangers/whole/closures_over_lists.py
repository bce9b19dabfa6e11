"""Plain lists of tensors and closures; heads one by one."""

import torch


def build(seed=3):
    g = torch.Generator().manual_seed(seed)

    def r(*s):
        return torch.randn(*s, generator=g) / s[-1] ** 0.5

    def o(n):
        return 1 + 0.2 * torch.randn(n, generator=g)

    def rms(w, eps):
        return lambda x: x / (x * x).mean(-1, keepdim=True).add(eps).sqrt() * w

    def swish(x):
        return x * torch.sigmoid(x)

    def make_kda(D=32, H=2, K=8):
        W = [r(H * K, D) for _ in range(3)]
        cw = [r(4, H * K) for _ in range(3)]
        fa, fb = r(K, D), r(H * K, K)
        A, dt = torch.rand(H, generator=g), r(H * K)
        wb = r(H, D)
        wg = r(H * K, D)
        wo = r(D, H * K)
        norm = rms(o(K), 1e-5)

        def conv(x, w, old):
            T = x.shape[1]
            x = torch.cat([old, x], 1)
            y = x[:, 0:T] * w[0] + x[:, 1 : T + 1] * w[1] + x[:, 2 : T + 2] * w[2] + x[:, 3 : T + 3] * w[3]
            return swish(y), x[:, -3:]

        def unit(x):
            return x / ((x * x).sum(-1, keepdim=True) + 1e-6) ** 0.5

        def f(x, cache):
            olds, S = cache
            B, T, _ = x.shape
            qkv = [conv(x @ w.T, c, old) for w, c, old in zip(W, cw, olds)]
            q, k, v = [a.reshape(B, T, H, K) for a, _ in qkv]
            q, k = unit(q) / K**0.5, unit(k)
            dec = torch.exp(-5 / (1 + torch.exp(-(A.exp()[:, None] * (x @ fa.T @ fb.T + dt).reshape(B, T, H, K)))))
            b = torch.sigmoid(x @ wb.T)
            ys = []
            for t in range(T):
                S = dec[:, t, :, :, None] * S
                d = b[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(2))
                S = S + k[:, t, :, :, None] * d[:, :, None, :]
                ys.append((S * q[:, t, :, :, None]).sum(2))
            y = norm(torch.stack(ys, 1)) * torch.sigmoid(x @ wg.T).reshape(B, T, H, K)
            return y.reshape(B, T, H * K) @ wo.T, ([n for _, n in qkv], S)

        return f

    def make_mla(D=32, H=2, K=8, L=16):
        qa, qan, qb = r(12, D), rms(o(12), 1e-6), [r(K, 12) for _ in range(H)]
        ka, kan = r(L, D), rms(o(L), 1e-6)
        uk = [r(K, L) for _ in range(H)]
        uv = [r(K, L) for _ in range(H)]
        iq = [r(8, 12) for _ in range(8)]
        ik = r(8, D)
        lw, lb = o(8), r(8)
        iw = r(8, D)
        wg = r(H * K, D)
        wo = r(D, H * K)

        def ln(x):
            m = x.mean(-1, keepdim=True)
            v = ((x - m) ** 2).mean(-1, keepdim=True)
            return (x - m) / torch.sqrt(v + 1e-6) * lw + lb

        def f(x, cache):
            a = qan(x @ qa.T)
            n0 = 0
            c = kan(x @ ka.T)
            ki = ln(x @ ik.T)
            if cache:
                n0 = cache[0].shape[1]
                c = torch.cat([cache[0], c], 1)
                ki = torch.cat([cache[1], ki], 1)
            T, S = x.shape[1], c.shape[1]
            w = x @ iw.T
            sc = sum(w[:, :, h, None] * torch.relu(a @ iq[h].T @ ki.mT) for h in range(8))
            vis = torch.arange(S)[None, :] <= torch.arange(n0, n0 + T)[:, None]
            sc = torch.where(vis, sc, torch.full_like(sc, -1e30))
            top = torch.topk(sc, min(4, S), -1)[1]
            keep = torch.zeros_like(sc).scatter_(-1, top, 1.0) * vis
            heads = []
            for h in range(H):
                l = (a @ qb[h].T @ uk[h]) @ c.mT / K**0.5
                l = torch.where(keep > 0, l, -1e30)
                e = torch.exp(l - l.max(-1, keepdim=True)[0]) * keep
                heads.append(e / e.sum(-1, keepdim=True) @ c @ uv[h].T)
            return (torch.cat(heads, -1) * torch.sigmoid(x @ wg.T)) @ wo.T, [c, ki]

        return f

    def make_moe(D=32, E=6, Lt=16, I=12):
        R, b = r(E, D), r(E) * 0.1
        dn, up = r(Lt, D), r(D, Lt)
        ex = [(r(I, Lt), r(I, Lt), r(Lt, I)) for _ in range(E)]
        nm = rms(o(Lt), 1e-5)
        s = (r(I, D), r(I, D), r(D, I))

        def ffn(x, w):
            return (swish(x @ w[0].T) * (x @ w[1].T)) @ w[2].T

        def f(x):
            p = torch.sigmoid(x @ R.T)
            top = torch.topk(p + b, 2, -1)[1]
            wt = torch.take_along_dim(p, top, -1)
            wt = wt / wt.sum(-1, keepdim=True)
            z = x @ dn.T
            y = torch.zeros_like(z)
            for e, w in enumerate(ex):
                y = y + ffn(z, w) * ((top == e) * wt).sum(-1, keepdim=True)
            return nm(y) @ up.T + ffn(x, s)

        return f

    def make_mix(D=32):
        q, n = r(D), rms(o(D), 1e-5)

        def f(vs):
            ls = [(n(v) * q).sum(-1) for v in vs]
            m = torch.stack(ls, -1).max(-1)[0]
            es = [torch.exp(l - m) for l in ls]
            z = sum(es)
            return sum((e / z)[..., None] * v for e, v in zip(es, vs))

        return f

    emb, head = r(50, 32) * 5, r(50, 32)
    layers = [
        (make_mix(), rms(o(32), 1e-5), mk(), make_mix(), rms(o(32), 1e-5), make_moe()) for mk in (make_kda, make_mla)
    ]
    fm, fn = make_mix(), rms(o(32), 1e-5)

    def model(ids, caches):
        vs = [emb[ids]]
        new = []
        for (m1, n1, at, m2, n2, ff), c in zip(layers, caches):
            y, c = at(n1(m1(vs) if len(vs) > 1 else vs[0]), c)
            new.append(c)
            vs = vs + [y]
            vs = vs + [ff(n2(m2(vs)))]
        return fn(fm(vs)) @ head.T, new

    return model


def drive(call, model, ids):
    y, c = call(ids, [([torch.zeros(2, 3, 16) for _ in range(3)], torch.zeros(2, 2, 8, 8)), []])
    yield "prefill", y
    y, c = call((ids[:, :1] + 3) % 50, c)
    yield "decode", y


_e = dict(kda=1, short_conv=3, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=4)
expect = dict(prefill=_e, decode=_e)
