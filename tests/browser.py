"A headless Chromium, driven over a pipe by its own protocol: no driver, no port, no network"
import json, os, select, shutil, subprocess
from itertools import count

import psutil

import house

FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run',
         '--host-resolver-rules=MAP * ~NOTFOUND', '--window-size=1280,900', '--hide-scrollbars',
         '--disable-renderer-backgrounding', '--disable-background-timer-throttling',
         '--disable-backgrounding-occluded-windows', '--remote-debugging-pipe']

class Browser:
    "One page at a time: open it, evaluate JavaScript in it, collect its errors"
    def __init__(self, home):
        (down, self.out), (self.inp, up) = os.pipe(), os.pipe()
        run = ['bash', '-c', f'exec "$@" 3<&{down} 4>&{up}', 'bash', shutil.which('chromium')]
        flags = [*FLAGS, f'--user-data-dir={home}', 'about:blank']
        self.process = subprocess.Popen([*run, *flags], pass_fds=(down, up), stderr=subprocess.DEVNULL)
        for end in down, up: os.close(end)
        self.ids, self.buffer, self.events, self.session = count(1), b'', [], None
        page = next(t for t in self('Target.getTargets')['targetInfos'] if t['type'] == 'page')
        self.session = self('Target.attachToTarget', targetId=page['targetId'], flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'): self(f'{domain}.enable')

    def read(self):
        "The next message of the browser"
        while b'\0' not in self.buffer:
            if not select.select([self.inp], [], [], 60)[0]: raise TimeoutError('no message for a minute')
            if not (more := os.read(self.inp, 1 << 16)): raise EOFError('the browser has ended')
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def __call__(self, method, **params):
        "Call a method, and collect the events that come before its result"
        call = dict(id=next(self.ids), method=method, params=params)
        if self.session: call['sessionId'] = self.session
        os.write(self.out, json.dumps(call).encode() + b'\0')
        while (message := self.read()).get('id') != call['id']: self.events.append(message)
        if 'error' in message: raise RuntimeError(f'{method}: {message["error"]["message"]}')
        return message['result']

    def js(self, expression):
        "The value of an expression, promises awaited"
        r = self('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
        wrong = r.get('exceptionDetails')
        if wrong: raise RuntimeError(wrong['exception'].get('description', wrong))
        return r['result'].get('value')

    def open(self, url):
        "Load a page, wait until it is typeset, and return its errors"
        self.events.clear()
        self('Page.navigate', url=url)
        while not self.events or self.events[-1]['method'] != 'Page.loadEventFired':
            self.events.append(self.read())
        self.js('window.MathJax?.startup ? MathJax.startup.promise.then(() => 1) : 1')
        return [c for e in self.events for c in errors(e['method'], e['params'])]

    def press(self, key, code):
        "Press and release a key"
        for step in 'keyDown', 'keyUp':
            self('Input.dispatchKeyEvent', type=step, key=key, code=key, windowsVirtualKeyCode=code)

    def close(self):
        run = psutil.Process(self.process.pid)
        for process in run, *run.children(recursive=True): house.SPENT.seconds += sum(process.cpu_times()[:2])
        self.process.kill()   # one that hangs does not answer a polite request
        self.process.wait()
        for end in self.out, self.inp: os.close(end)

def errors(method, p):
    "Errors and warnings of the console, exceptions, requests that failed or left the disk"
    match method:
        case 'Runtime.consoleAPICalled' if p['type'] in ('error', 'warning', 'assert'):
            yield f'console: {[a.get("value") for a in p["args"]]}'
        case 'Runtime.exceptionThrown':
            yield f'exception: {p["exceptionDetails"].get("exception", p["exceptionDetails"])}'
        case 'Log.entryAdded' if p['entry']['level'] in ('error', 'warning'):
            yield f'log: {p["entry"]["text"]} {p["entry"].get("url", "")}'
        case 'Network.loadingFailed' if not p.get('canceled'):
            yield f'not loaded: {p["errorText"]} {p["requestId"]}'
        case 'Network.requestWillBeSent' if not p['request']['url'].startswith(('file:', 'data:', 'blob:')):
            yield f'requested {p["request"]["url"]}'
