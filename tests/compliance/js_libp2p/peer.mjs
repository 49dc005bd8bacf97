// A js-libp2p peer that does what it is told on standard input, one JSON object per line, and answers in kind.
import { createInterface } from 'node:readline'
import { createHash } from 'node:crypto'
import { createLibp2p } from 'libp2p'
import { tcp } from '@libp2p/tcp'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { gossipsub } from '@chainsafe/libp2p-gossipsub'
import { multiaddr } from '@multiformats/multiaddr'
import { TopicValidatorResult } from '@libp2p/interface'
import { CID } from 'multiformats/cid'
import * as Digest from 'multiformats/hashes/digest'

// Node.js before 22 lacks it, and libp2p's dependencies rely on it.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((yes, no) => { resolve = yes; reject = no })
  return { promise, resolve, reject }
}

const say = (value) => process.stdout.write(JSON.stringify(value) + '\n')

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({ protocol: '/swarmllm/kad/1.0.0', clientMode: false, peerInfoMapper: passthroughMapper }),
    pubsub: gossipsub({
      globalSignaturePolicy: 'StrictNoSign',
      allowPublishToZeroTopicPeers: true,
      emitSelf: false,
      msgIdFn: (message) =>
        createHash('sha256').update(message.topic).update(Buffer.from([0])).update(message.data).digest()
    })
  }
})

const heard = []
const waiting = []
node.services.pubsub.addEventListener('message', ({ detail }) => {
  heard.push({ topic: detail.topic, text: Buffer.from(detail.data).toString() })
  waiting.splice(0).forEach((wake) => wake())
})

const cidOf = (key) => CID.createV1(0x55, Digest.decode(Buffer.from(key, 'hex')))

const commands = {
  where: () => ({ id: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) }),
  dial: async ({ address }) => {
    const connection = await node.dial(multiaddr(address))
    return { peer: connection.remotePeer.toString(), encryption: connection.encryption, muxer: connection.multiplexer }
  },
  identify: async ({ peer }) => {
    const connection = node.getConnections().find((each) => each.remotePeer.toString() === peer)
    const found = await node.services.identify.identify(connection)
    return { agent: found.agentVersion, protocols: found.protocols, addresses: found.listenAddrs.map(String) }
  },
  ping: async ({ address }) => ({ ms: await node.services.ping.ping(multiaddr(address)) }),
  subscribe: async ({ topic }) => {
    node.services.pubsub.topicValidators.set(topic, () => TopicValidatorResult.Accept)
    node.services.pubsub.subscribe(topic)
    return {}
  },
  subscribers: async ({ topic }) => ({ peers: node.services.pubsub.getSubscribers(topic).map(String) }),
  publish: async ({ topic, text }) => {
    const { recipients } = await node.services.pubsub.publish(topic, Buffer.from(text))
    return { recipients: recipients.map(String) }
  },
  // Keys are multihashes in hexadecimal digits.
  provide: async ({ key }) => {
    await node.contentRouting.provide(cidOf(key))
    return {}
  },
  providers: async ({ key }) => {
    const found = []
    for await (const peer of node.contentRouting.findProviders(cidOf(key))) {
      found.push({ peer: peer.id.toString(), addresses: peer.multiaddrs.map(String) })
    }
    return found
  },
  neighbours: () => ({ n: node.services.dht.routingTable.size }),
  // The next message, or null where none comes within a second.
  hear: async () => {
    if (heard.length === 0) {
      await Promise.race([
        new Promise((wake) => waiting.push(wake)),
        new Promise((wake) => setTimeout(wake, 1000))
      ])
    }
    return heard.shift() ?? null
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...rest } = JSON.parse(line)
  try {
    say({ ok: await commands[command](rest) })
  } catch (error) {
    say({ error: `${error.name}: ${error.message}` })
  }
}
await node.stop()
